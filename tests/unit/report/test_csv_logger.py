"""metrics.csv: a start that resumes continues it after the last whole row."""

from mpitrain.report.loggers.catalog import LoggedRun
from mpitrain.report.loggers.csv_files import CsvLogger


def test_a_torn_row_is_gone_though_no_new_one_comes(tmp_path):
    first = CsvLogger(LoggedRun("run", tmp_path, {}))
    first.log(4, {"loss": 2.5}, 90.0)
    first.end()
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("5,100.")  # and then a kill
    CsvLogger(LoggedRun("run", tmp_path, {}, resumed=True)).end()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,time,loss", "4,90.0,2.5"]
