"""What measures the course: report (fragments of pages), runs (training), bars (pictures), and pages/."""
