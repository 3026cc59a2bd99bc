from .doctor import examine as examine
