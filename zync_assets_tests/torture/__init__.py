"""Everything at once, for as long as one likes: a pipeline under traffic while its processes, broker and registry are killed.

    python -m zync_assets_tests.torture --minutes 10 --seed 1 [--folder F]

``plan`` draws what happens from the seed (the same seed, the same schedule); ``world`` has the services, topics and lake;
``traffic`` produces changes; ``children`` runs ``zync`` and kills it; ``sensor`` runs Dagster's daemon and kills it and its
runs; ``faults`` harms the services; ``judgement`` drains the pipeline and asks the checker and the model; ``report`` sums up
over all runs in one folder.
"""
