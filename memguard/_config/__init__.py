"""The budget file: `budget.py` has its models and reads it; the other modules serve that one."""

from memguard._config.budget import FRAMEWORKS as FRAMEWORKS
from memguard._config.budget import Budget as Budget
from memguard._config.budget import DeviceBudget as DeviceBudget
from memguard._config.budget import DeviceOverride as DeviceOverride
from memguard._config.budget import DoctorConfig as DoctorConfig
from memguard._config.budget import FrameworkBudget as FrameworkBudget
from memguard._config.budget import MetricsConfig as MetricsConfig
from memguard._config.budget import MonitorConfig as MonitorConfig
from memguard._config.budget import SuspendConfig as SuspendConfig
from memguard._config.budget import json_schema as json_schema
from memguard._config.budget import of as of
from memguard._config.budget import received as received

load, parse, from_mapping = Budget.load, Budget.from_text, Budget.from_mapping
