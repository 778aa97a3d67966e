from .evidence import restore as restore
