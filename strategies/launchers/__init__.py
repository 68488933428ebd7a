"""What starts the processes of a run, or finds itself among those that are started."""
