"""System services that long-running commands use."""

from postroom.adapters.system.service_manager import ServiceManager

__all__ = ["ServiceManager"]
