"""The budget file: `budget.py` has its models and reads it; the other modules serve that one."""

from memguard._config.schema import FRAMEWORKS as FRAMEWORKS
from memguard._config.schema import Budget as Budget
from memguard._config.schema import DeviceBudget as DeviceBudget
from memguard._config.schema import DeviceOverride as DeviceOverride
from memguard._config.schema import DoctorConfig as DoctorConfig
from memguard._config.schema import FrameworkBudget as FrameworkBudget
from memguard._config.schema import MetricsConfig as MetricsConfig
from memguard._config.schema import MonitorConfig as MonitorConfig
from memguard._config.schema import SuspendConfig as SuspendConfig
from memguard._config.schema import json_schema as json_schema
from memguard._config.schema import of as of
from memguard._config.schema import received as received

load, parse, from_mapping = Budget.load, Budget.from_text, Budget.from_mapping
