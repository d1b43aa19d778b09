"""Workers: functions that handle the messages of a mailbox."""
