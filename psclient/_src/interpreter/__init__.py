"""What Python does with the process: interrupts of its main thread, and lives of its objects.

interrupts  SIGINT is raised where it does no harm
lifetimes   callbacks that keep nothing alive, and objects that no other process can have
"""
