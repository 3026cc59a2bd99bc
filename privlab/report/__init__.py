"""What people look at: tables and pictures, each made from records."""
