from .apply import explain as explain
from .apply import optimize as optimize
from .apply import plan_of as plan_of
from .apply import restore as restore
from .plan import KernelPlan as KernelPlan
