"""The budget file, whose models and parser are in `schema`, and its resolution against GPUs, in `policy`."""

from memguard._budget.schema import FRAMEWORKS as FRAMEWORKS
from memguard._budget.schema import Budget as Budget
from memguard._budget.schema import DeviceBudget as DeviceBudget
from memguard._budget.schema import DeviceOverride as DeviceOverride
from memguard._budget.schema import DoctorConfig as DoctorConfig
from memguard._budget.schema import FrameworkBudget as FrameworkBudget
from memguard._budget.schema import MetricsConfig as MetricsConfig
from memguard._budget.schema import MonitorConfig as MonitorConfig
from memguard._budget.schema import SuspendConfig as SuspendConfig
from memguard._budget.schema import json_schema as json_schema
from memguard._budget.schema import of as of
from memguard._budget.schema import received as received

load, parse, from_mapping = Budget.load, Budget.from_text, Budget.from_mapping
