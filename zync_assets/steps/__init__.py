"""The three steps, each as a read and a commit half, and the plan that decides whether there is anything to do.

Plans need no JVM. The ``zync`` command and Dagster's IO managers compose the same halves.
"""
