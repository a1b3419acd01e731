"""The screen of `memguard top`: who holds a GPU's memory, while it happens. Only `app` and `dialogs` need textual."""
