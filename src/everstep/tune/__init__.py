"""The cost models: how often a base, how many steps a sync, which mode, and what that costs. Pure: numbers in, numbers out.

    what a run measures ──> averages ──┐
                                       ├──> model.cost_of ──> choose ──> Decision ──> tuner (when to change one's mind)
    what a plan assumes ───> planning ─┘                        │
                                                 simulate, references: what the model is compared with
"""
