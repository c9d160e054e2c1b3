"""What scripts/gpu_check.py checks and measures. A stage is a function of a Check; when its time is over, the runner raises
Late out of whatever the stage has started.
"""
