"""The lab: a small trained target and drafter that retell the story without a GPU."""
