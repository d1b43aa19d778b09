-- Messages have their sticky keys from here on, and may be rescheduled (ADR 0115): a former version would deliver
-- them out of order. The tables do not change.

SELECT format FROM store_format;
