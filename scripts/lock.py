"""Writes lock.txt: the hashes of constraints.txt's packages for Linux x86-64 and Python 3.11, from pip's report:  make lock"""

import json
import sys

for found in json.load(sys.stdin)["install"]:
    name, version = found["metadata"]["name"], found["metadata"]["version"]
    print(f"{name}=={version} --hash=sha256:{found['download_info']['archive_info']['hashes']['sha256']}")
