"""`mlmclm data verify`: check that a prepared corpus is still what was written."""

from __future__ import annotations

from mlmclm.cli import options


def verify(
    file: options.Study,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Reads all shards of a study's corpus and compares them with the checksums of its index; names damaged ones.

    Commands that open a corpus look at the sizes of the shards only, which takes no time; training reads each shard that it uses.

    Example: mlmclm data verify examples/quickstart.yaml
    """
    from mlmclm.cli.output import print_json, show
    from mlmclm.corpora.prepared_corpus import verify as verify_corpus
    from mlmclm.errors import EnvironmentFault, UserError
    from mlmclm.progress import bars
    from mlmclm.study.prepare import find_study_corpus
    from mlmclm.study.study_file import load_study

    study, place = load_study(file), options.place(store, data)
    corpus = find_study_corpus(study, place)
    if corpus is None:
        raise UserError(f"{file}: its corpus is not prepared yet: run `mlmclm data {file}`.")
    with bars() as progress:
        sources = corpus.sources.values()
        wrong = {name: what for source in sources for name, what in verify_corpus(source, progress).items()}
    shards = [shard for blocks in (corpus.train, corpus.validation) for shard in blocks.shards]
    if as_json:
        print_json({"corpus": corpus.key, "shards": len(shards), "damaged": wrong})
    if wrong:
        lines = "\n".join(f"{name}: {what}." for name, what in wrong.items())
        raise EnvironmentFault(
            f"{lines}\nDelete what is there of {'it' if len(wrong) == 1 else 'them'} and run `mlmclm data {file}`: what is whole is kept."
        )
    if not as_json:
        unknown = sum(shard.sha256 is None for shard in shards)
        note = f" ({unknown} of an earlier version have no checksum: their sizes are right)" if unknown else ""
        show(f"{len(shards)} shards of corpus {corpus.key} are what was written{note}")
