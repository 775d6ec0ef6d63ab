"""The cost models: how often a base, how many steps a sync, which mode, and what that costs. Pure: numbers in, numbers out.

    what a run measures ──> averages ──┐
                                       ├──> model.cost_of ──> choose ──> Decision ──> tuner (when to change one's mind)
    what a plan assumes ───> planning ─┘                        │
                                                 simulate, references: what the model is compared with

    pieces of a state, bandwidths ──> schedule (on link, a simulated one) ──> what leaves how, memory, stalls ──> picture
"""

from everstep.tune.choice import Decision, choose
from everstep.tune.model import Codec, Cost, Limits, Measured, Setting, cost_of
from everstep.tune.planning import Assumed, Plan, plan

__all__ = ["Assumed", "Codec", "Cost", "Decision", "Limits", "Measured", "Plan", "Setting", "choose", "cost_of", "plan"]
