"""From the text of a pipeline file to the model, or to every problem of it, each with line, key and cure.

source → fields      YAML with line numbers; typed access to its mappings
grammar              every key with its description: the names that the readers know, and the text of `zync help`
topics, rules        the sections inputs and outputs, and transforms
expressions, join_on, functions, reach
                     what Spark SQL may say in a rule, and which rules can never be reached; no JVM
zync_home            the connections of zync's own files, where the pipeline file has none
load                 the whole file
"""

from zync_assets.pipeline_file.load import load

__all__ = ["load"]
