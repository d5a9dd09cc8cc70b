"""How runs begin: held, compared, asked for, written, submitted, one or many; and how they are cancelled."""
