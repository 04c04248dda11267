#!/bin/bash
# grain 0.2.18, IndexSampler with ShardOptions, which DataLoader needs on several ranks; drop_remainder is False, the default.
# Guess: the ranks together read each record once in an epoch; the first ones have one more where the number isn't divisible.
# In fact the shards are cut so, but each rank reads as many records as the smallest shard has. The remainder is dropped, and from the
# middle: the longer shards lose their last records. Over several epochs the remainder goes round within each shard instead, so
# records of long shards are seen less often than those of short ones.
# Hurts: evaluation on several ranks (1000 examples on 64: 960 are scored), and data sets that are small for the number of ranks.
# Source: ShardOptions' documentation says that without drop_remainder "the remainder N" is distributed "over the first N shards";
# google/grain, grain/_src/python/samplers.py, divides the number of all records by that of the ranks. No issue found.
# Output seen: 10 records on 4 ranks: [0, 1], [3, 4], [6, 7], [8, 9]; 1000 on 64: 960 read; 10 on 4 in three epochs: the six records of
# the first two ranks are read 2.3 times each, the others 3.5 times.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q grain==0.2.18 || exit 2
"$place/venv/bin/python" -W ignore - 2>"$place/log" <<'PYTHON' || { code=$?; tail -n 3 "$place/log"; exit $code; }
import importlib.metadata
import sys

from grain import python as grain


def read(records, ranks, epochs=1, shuffle=False):
    return [
        [
            int(record)
            for record in grain.DataLoader(
                data_source=grain.RangeDataSource(0, records, 1),
                sampler=grain.IndexSampler(
                    records, shuffle=shuffle, seed=0, num_epochs=epochs,
                    shard_options=grain.ShardOptions(rank, ranks, drop_remainder=False),
                ),
            )
        ]
        for rank in range(ranks)
    ]


print("grain", importlib.metadata.version("grain"))
few = read(10, 4)
print("10 records on 4 ranks:", few)
many = [len({record for each in read(1000, 64, shuffle=shuffle) for record in each}) for shuffle in (False, True)]
print(f"1000 records on 64 ranks: {many[0]} different ones read, {many[1]} shuffled")
epochs = [record for each in read(10, 4, epochs=3, shuffle=True) for record in each]
long, short = (sum(record in part for record in epochs) for part in (range(6), range(6, 10)))
print(f"10 records on 4 ranks, three epochs: those of the first two ranks {long / 6:.1f} times each, the others {short / 4:.1f}")
same = few == [[0, 1], [3, 4], [6, 7], [8, 9]] and many == [960, 960] and (long, short) == (14, 14)
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON
