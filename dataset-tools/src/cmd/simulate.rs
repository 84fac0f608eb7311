//! `fletch simulate`: plays cases in virtual time, with the code that the server decides with.

use super::{Ctx, streamed};
use crate::failure::Failure;
use crate::out::Rows;
use crate::progress::Mode;
use fletch_sim::{BadCase, Outcome, cli::SimulateArgs, table, traces};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Between two plain lines of progress.
const PLAIN_EVERY: Duration = Duration::from_secs(5);

/// What `--json` prints before the outcomes.
#[derive(Serialize)]
struct Head {
    format: &'static str,
    major: u32,
    minor: u32,
}

const HEAD: Head = Head { format: "fletch.simulation", major: 1, minor: 0 };

/// What `--json` prints after them.
#[derive(Serialize)]
struct Summary {
    runs: usize,
    seconds: f64,
}

impl From<BadCase> for Failure {
    fn from(e: BadCase) -> Self {
        let failure = match &e {
            BadCase::Read { path, why } | BadCase::Write { path, why } => {
                return Failure::io(path.display(), why);
            }
            BadCase::Param { .. } | BadCase::Record => Failure::usage(e.to_string()),
            BadCase::Long { .. } | BadCase::Parse { .. } | BadCase::Faults { .. } | BadCase::Trace { .. } => {
                Failure::new(e.to_string())
            }
        };
        failure.hint("docs/SIMULATE.md says how a case is written, and what can be set")
    }
}

/// Shows how far the runs are: on one thread with them, since they say so themselves.
struct Shown {
    bar: Option<ProgressBar>,
    plain: bool,
    runs: usize,
    said: Instant,
}

impl Shown {
    fn new(ctx: &Ctx, runs: usize) -> Self {
        let bar = match ctx.global.progress {
            _ if ctx.out.quiet => None,
            Mode::None => None,
            Mode::Bar => Some(true),
            Mode::Plain => Some(false),
            Mode::Auto => Some(std::io::stderr().is_terminal()),
        };
        let display = (bar == Some(true)).then(|| {
            let b = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{percent:>3} % {bar:30} {msg}, {eta} left") {
                b.set_style(style);
            }
            b
        });
        Shown { bar: display, plain: bar == Some(false), runs, said: Instant::now() }
    }

    /// Run number `at` is done to this part of it.
    fn see(&mut self, at: usize, name: &str, part: f64) {
        let all = (at as f64 + part.clamp(0.0, 1.0)) / self.runs.max(1) as f64;
        let line = || format!("{name} ({} of {})", at + 1, self.runs);
        if let Some(b) = &self.bar {
            b.set_message(line());
            b.set_position((all * 1000.0) as u64);
        } else if self.plain && self.said.elapsed() >= PLAIN_EVERY {
            self.said = Instant::now();
            eprintln!("simulating {}: {:.0} % of all", line(), all * 100.0);
        }
    }
}

pub fn run(ctx: &Ctx, args: &SimulateArgs) -> Result<(), Failure> {
    if let Some(path) = &args.play {
        let same = traces::play(path)?;
        return ctx.out.result(&same, |w| writeln!(w, "{same}"));
    }
    let runs = args.runs()?;
    let mut shown = Shown::new(ctx, runs.len());
    let began = Instant::now();
    // A recorded run is the only one, and can fail: before anything is printed.
    let recorded = match runs.first().filter(|r| r.record.is_some()) {
        Some(run) => Some(run.play(&mut |_| {})?),
        None => None,
    };
    streamed(|out| {
        let json = ctx.out.json;
        if !json {
            writeln!(out, "{}", table::HEADING)?;
        }
        let mut rows = Rows::begin(out, json, &HEAD, "outcomes")?;
        for (at, run) in runs.iter().enumerate() {
            shown.see(at, &run.case.name, 0.0);
            let outcome = match &recorded {
                Some(outcome) => outcome.clone(),
                None => run.simulate(&mut |part| shown.see(at, &run.case.name, part)),
            };
            rows.push(&outcome, |o: &Outcome, w| writeln!(w, "{}", table::line(o)))?;
        }
        let summary = Summary { runs: runs.len(), seconds: began.elapsed().as_secs_f64() };
        if let Some(b) = &shown.bar {
            b.finish_and_clear();
        }
        rows.end("summary", &summary)
    })
}
