"""Reads a pipeline file into the model. Reports every problem of the file with its line, key and cure.

    source → fields      YAML with line numbers; typed access to its mappings
    grammar              every key with its description: the names that the readers know, and the text of `zync help`
    topics, rules        the sections inputs and outputs, and transforms
    expressions, join_on, functions, reach
                         the Spark SQL that a rule may use, and rules that no record can reach; no JVM
    zync_home            the connections in zync's own files, for a pipeline file without connections
    load                 the whole file

The package needs neither a JVM nor a network.
"""

from zync_assets.pipeline_file.load import load_pipeline

load = load_pipeline

__all__ = ["load", "load_pipeline"]
