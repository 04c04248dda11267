"""Templates and statistics in the form of Winogender's published files."""

from __future__ import annotations

TEMPLATES = """occupation(0)\tother-participant(1)\tanswer\tsentence
baker\tguest\t0\tThe $OCCUPATION told the $PARTICIPANT that $NOM_PRONOUN was late.
baker\tguest\t1\tThe $PARTICIPANT gave the $OCCUPATION $POSS_PRONOUN hat.
pilot\tguest\t0\tThe $OCCUPATION said that the $PARTICIPANT saw $ACC_PRONOUN today.
pilot\tguest\t1\tThe $OCCUPATION asked the $PARTICIPANT if $NOM_PRONOUN knew.
"""
STATISTICS = "occupation\tbergsma_pct_female\tbls_pct_female\tbls_year\nbaker\t50\t60.5\t2015\npilot\t5\t7\t2015\n"
