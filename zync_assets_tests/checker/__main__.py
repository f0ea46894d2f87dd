"""``python -m zync_assets_tests.checker``: judge a lake and its topics; exit code 1 on any finding."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from zync_assets_tests.checker.evidence import gather
from zync_assets_tests.checker.statement import KNOWN
from zync_assets_tests.checker.verdict import judge
from zync_assets_tests.checker.wire import Schemas


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zync_assets_tests.checker", description=__doc__)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--registry", required=True, help="URL of Confluent's API")
    parser.add_argument("--lake", required=True, type=Path)
    parser.add_argument("--statement", choices=sorted(KNOWN), default="shop", help="which pipeline this is")
    parser.add_argument("--prefix", required=True, help="what the names of the pipeline's topics begin with")
    parser.add_argument("--database", type=Path, help="the file of SQLite that the sinks write; none: look at no sink")
    parser.add_argument("--drained", action="store_true", help="nothing may be left to do")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    chosen = parser.parse_args(arguments)
    statement = KNOWN[chosen.statement](chosen.prefix)
    evidence = gather(chosen.bootstrap_servers, chosen.lake, statement, chosen.database)
    with_sinks = chosen.database is not None
    report = judge(statement, evidence, Schemas(chosen.registry), drained=chosen.drained, with_sinks=with_sinks)
    if chosen.format == "json":
        findings = [{"kind": item.kind, "text": item.text} for item in report.findings]
        print(json.dumps({"sound": report.sound, "findings": findings, "numbers": report.numbers}))
    else:
        print(report)
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
