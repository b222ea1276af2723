"""Files of a run folder that have a format of their own: pid file, job record, and its short path."""
