"""What a user might write instead of a Spark job: the search model by other means, each in one process."""
