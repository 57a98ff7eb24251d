import os
from tests.ssh.test_deaths import *
def test_e(tmp_path, host, client):
    with opened(tmp_path, host, client) as desk:
        line = desk.line()
        desk.script.write_text(ENDINGS)
        large = desk.folder / "large"
        large.write_bytes(os.urandom(16 * MIB))
        arguments = desk.overrides("job.args=[bytes]", f"job.files=[{large}]")
        commands = [desk.start(*arguments) for _ in range(8)]
        t=time.time()
        for command in commands:
            s=desk.ended(command); print(s.count("waiting"), round(time.time()-t,1))
        print(line.sent/MIB)
