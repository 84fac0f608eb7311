//! `fletch simulate`: plays cases in virtual time, with the same policy code as the server.

use super::{Context, streamed};
use crate::failure::Failure;
use crate::out::Rows;
use crate::progress::PLAIN_EVERY;
use fletch_sim::{
    BadCase, Outcome,
    cli::SimulateArgs,
    cluster::{self, table::Row},
    table, traces,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::time::Instant;

/// The fields before the outcomes in `--json`.
#[derive(Serialize)]
struct Head {
    format: &'static str,
    major: u32,
    minor: u32,
}

const HEAD: Head = Head { format: "fletch.simulation", major: 1, minor: 0 };

/// The fields after the outcomes in `--json`.
#[derive(Serialize)]
struct Summary {
    runs: usize,
    seconds: f64,
}

fn bad_case(e: &BadCase) -> Failure {
    let failure = match e {
        BadCase::Read { path, why } | BadCase::Write { path, why } => {
            return Failure::io(path.display(), why);
        }
        BadCase::Param { .. } | BadCase::Record => Failure::usage(e.to_string()),
        BadCase::Long { .. } | BadCase::Parse { .. } | BadCase::Faults { .. } | BadCase::Trace { .. } => {
            Failure::new(e.to_string())
        }
    };
    failure.hint("docs/SIMULATE.md describes the format of a case and its settings")
}

/// The progress display of the runs. It shares their thread: each run reports its own progress.
struct RunsProgress {
    bar: Option<ProgressBar>,
    plain: bool,
    runs: usize,
    said: Instant,
}

impl RunsProgress {
    fn new(ctx: &Context, runs: usize) -> Self {
        let bar = ctx.global.progress.is_bar(ctx.out);
        let display = (bar == Some(true)).then(|| {
            let b = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{percent:>3} % {bar:30} {msg}, {eta} left") {
                b.set_style(style);
            }
            b
        });
        RunsProgress { bar: display, plain: bar == Some(false), runs, said: Instant::now() }
    }

    /// Shows that the share `part` of run number `at` is done.
    fn show(&mut self, at: usize, name: &str, part: f64) {
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

pub fn run(ctx: &Context, args: &SimulateArgs) -> Result<(), Failure> {
    if let Some(path) = &args.play {
        let same = traces::play(path).map_err(|e| bad_case(&e))?;
        return ctx.out.result(&same, |w| writeln!(w, "{same}"));
    }
    if args.is_clusters() {
        return clusters(ctx, args);
    }
    let runs = args.runs().map_err(|e| bad_case(&e))?;
    let mut shown = RunsProgress::new(ctx, runs.len());
    let began = Instant::now();
    // A run that records its trace can fail. It is the only run, so it is played before anything is printed.
    let recorded = match runs.first().filter(|r| r.record.is_some()) {
        Some(run) => Some(run.play(&mut |_| {}).map_err(|e| bad_case(&e))?),
        None => None,
    };
    streamed(|out| {
        let json = ctx.out.json;
        if !json {
            writeln!(out, "{}", table::HEADING)?;
        }
        let mut rows = Rows::begin(out, json, &HEAD, "outcomes")?;
        for (at, run) in runs.iter().enumerate() {
            shown.show(at, &run.case.name, 0.0);
            let outcome = match &recorded {
                Some(outcome) => outcome.clone(),
                None => run.simulate(&mut |part| shown.show(at, &run.case.name, part)),
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

/// Plays clusters in which jobs come and go.
fn clusters(ctx: &Context, args: &SimulateArgs) -> Result<(), Failure> {
    let rows = args.cluster_rows();
    let mut shown = RunsProgress::new(ctx, rows.len());
    let began = Instant::now();
    let mut failed = None;
    streamed(|out| {
        let json = ctx.out.json;
        if !json {
            writeln!(out, "{}", cluster::table::HEADING)?;
        }
        let mut out = Rows::begin(out, json, &HEAD, "clusters")?;
        for (at, row) in rows.iter().enumerate() {
            shown.show(at, row.0.name, 0.0);
            match args.play_row(row) {
                Ok(played) => out.push(&played, |row: &Row, w| writeln!(w, "{}", row.line()))?,
                Err(e) => failed = Some(e),
            }
        }
        if let Some(b) = &shown.bar {
            b.finish_and_clear();
        }
        out.end("summary", &Summary { runs: rows.len(), seconds: began.elapsed().as_secs_f64() })
    })?;
    failed.map_or(Ok(()), |e| Err(Failure::new(e.to_string())))
}
