import typer
app = typer.Typer(add_completion=False)
@app.command()
def doctor(): "hello"
