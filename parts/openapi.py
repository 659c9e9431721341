"""placeholder"""
def routes(operations, version, send):
    return []
