"""The configuration: Trinity's keys, read, checked and turned into what each role is told."""
