"""Pack the drafter that `recipes/nano.toml` made into the package, and keep the record of its training.

python recipes/pack_nano.py --built nano --sources text/SOURCES.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from omnidraft.packed import pack_drafter

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--built", type=Path, required=True)
    parser.add_argument("--sources", type=Path, required=True)
    given = parser.parse_args()
    pack_drafter(given.built, ROOT / "src" / "omnidraft" / "nano.safetensors")
    about = json.loads((given.built / "drafter.json").read_text(encoding="utf-8"))
    kept = about.pop("kept")
    log = (given.built / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    record = about | {
        "vocabulary": len(kept),
        "sources": json.loads(given.sources.read_text(encoding="utf-8")),
        "log": [json.loads(line) for line in log],
    }
    out = ROOT / "results" / "nano_training.json"
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
