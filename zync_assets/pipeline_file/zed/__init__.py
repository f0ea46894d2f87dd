"""Zed, the language of zync's own files, as Spark SQL.

    grammar       a Zed text → a tree of nodes; the tree knows the place of each node
    expressions   an expression → Spark SQL;  functions: each function of Zed in Spark SQL
    program       the Zed of one rule in a pipeline file → the key and the value of its output, its conditions and join key
    types         the types that a rule's Zed relies on, and the records that a rule spreads

The grammar is the subset that ``demo/zed.md`` describes. A text outside the subset is a problem, which names the Spark SQL to
write instead. A pipeline file without Zed loads none of the modules.
"""
