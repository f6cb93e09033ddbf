"""What connects astrai_core to other libraries: one module each, imported only by its users."""
