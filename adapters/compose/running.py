"""What long-running commands use of the system."""

from postroom.adapters.system.service_manager import ServiceManager

__all__ = ["ServiceManager"]
