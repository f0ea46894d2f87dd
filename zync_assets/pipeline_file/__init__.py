"""Reads a pipeline file into the model. Reports every problem of the file with its line, key and cure.

    source → fields      YAML with line numbers; typed access to its mappings
    keys, grammar        every key with its description: the names that the readers know, and the text of `zync help`
    topics, rules        the sections inputs and outputs, and transforms
    expressions, conditions, references
                         the Spark SQL that a rule may use, and rules that no record can reach; no JVM
    loader               the whole file, and the connections of a file without connections
    missing_fields       the fields that a rule names before a record has them, for the steps that read the rule

The package needs no JVM. Only ``missing_fields`` needs a network: it asks the registry.
"""

from zync_assets.pipeline_file.loader import load_pipeline

load = load_pipeline

__all__ = ["load", "load_pipeline"]
