//! The command line, for `fletch simulate` and `fletch-simulate` alike.

use crate::{ArmKind, BadCase, Case, Origin, Outcome, cases, engine, file, table, traces};
use clap::{Args, Parser, ValueEnum};
use fletch_core::order::sweep::SweepParams;
use std::{io::Write, path::PathBuf};

/// Simulates jobs that share a dataset through a cache, in virtual time.
#[derive(Debug, Parser)]
#[command(name = "fletch-simulate", version)]
pub struct Cli {
    /// What to run.
    #[command(flatten)]
    pub args: SimulateArgs,
    /// One JSON object a line instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Which cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// The thirteen main rows.
    Rows,
    /// Pauses, joins, leaves, subsets, sizes, strict readers.
    Extras,
    /// Cache × jobs × arrangement × speeds: 320 cases.
    Grid,
    /// Many jobs over many single-sample units, two epochs each.
    Scale,
}

/// What to simulate.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// A named set of cases.
    #[arg(value_enum, default_value = "rows", conflicts_with = "case")]
    pub which: Which,
    /// A TOML (.toml) or JSON file with one case or several.
    #[arg(long, value_name = "FILE")]
    pub case: Option<PathBuf>,
    /// What stands between jobs and origin (may be given several times).
    #[arg(long = "arm", value_enum, default_values = ["fletch"])]
    pub arms: Vec<ArmKind>,
    /// A constant of the policy, as name=value (may be given several times).
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Everything random of rows, grid and scale comes from it; a case file has its own, and extras theirs.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Units of the dataset, for rows and scale.
    #[arg(long, default_value_t = 800)]
    pub units: usize,
    /// Samples in a unit, for rows.
    #[arg(long, default_value_t = 32)]
    pub size: u32,
    /// Jobs, for scale.
    #[arg(long, default_value_t = 100)]
    pub jobs: usize,
    /// The cache as a part of the dataset, for scale.
    #[arg(long, default_value_t = 0.1)]
    pub cache: f64,
    /// Write the trace of the sweep of the one case that is run.
    #[arg(long, value_name = "FILE", conflicts_with = "play")]
    pub record: Option<PathBuf>,
    /// Make the calls of a trace again, a simulation's or a server's, and compare every answer.
    #[arg(long, value_name = "FILE", conflicts_with = "case")]
    pub play: Option<PathBuf>,
    /// Only cases whose name contains this.
    #[arg(long)]
    pub only: Option<String>,
    /// The origin's bandwidth, in samples a second, in place of all that a case says of its origin; without either a fetch takes no time.
    #[arg(long)]
    pub bandwidth: Option<f64>,
    /// The origin's latency, in seconds.
    #[arg(long, default_value_t = 0.0, requires = "bandwidth")]
    pub latency: f64,
    /// Samples each job holds that it has not consumed yet.
    #[arg(long)]
    pub leased: Option<usize>,
    /// Samples decided before they are granted.
    #[arg(long)]
    pub ahead: Option<usize>,
    /// How many older decisions one whose bytes are here may overtake.
    #[arg(long)]
    pub overtake: Option<usize>,
}

/// One case against one arm.
#[derive(Debug, Clone)]
pub struct Run {
    /// What is simulated.
    pub case: Case,
    /// What stands between its jobs and its origin.
    pub arm: ArmKind,
    /// The policy's constants.
    pub params: SweepParams,
    /// Where the trace goes, if anywhere.
    pub record: Option<PathBuf>,
}

impl Run {
    /// Plays it without recording; `watch` hears which part of it is done.
    #[must_use]
    pub fn simulate(&self, watch: &mut dyn FnMut(f64)) -> Outcome {
        engine::simulate_with(&self.case, self.arm, self.params, watch)
    }

    /// Plays it, and writes its trace where one is wanted.
    ///
    /// # Errors
    /// [`BadCase::Write`] when its trace cannot be written.
    pub fn play(&self, watch: &mut dyn FnMut(f64)) -> Result<Outcome, BadCase> {
        match &self.record {
            Some(path) => traces::record(&self.case, self.params, path),
            None => Ok(self.simulate(watch)),
        }
    }
}

impl Cli {
    /// Runs it.
    ///
    /// # Errors
    /// Unknown constants, unreadable or faulty cases, a writer that fails.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        if let Some(path) = &self.args.play {
            let played = traces::play(path)?;
            writeln!(out, "{played}")?;
            return Ok(());
        }
        if !self.json {
            writeln!(out, "{}", table::HEADING)?;
        }
        for run in self.args.runs()? {
            table::write(out, &run.play(&mut |_| {})?, self.json)?;
        }
        Ok(())
    }
}

impl SimulateArgs {
    /// What there is to run, in order; all of it has been checked.
    ///
    /// # Errors
    /// Any [`BadCase`].
    pub fn runs(&self) -> Result<Vec<Run>, BadCase> {
        let params = params(&self.set)?;
        let mut runs = Vec::new();
        for mut case in self.cases()? {
            if self.only.as_ref().is_some_and(|o| !case.name.contains(o.as_str())) {
                continue;
            }
            if let Some(bandwidth) = self.bandwidth {
                case.origin = Some(Origin::new(bandwidth, self.latency));
            }
            case.leased = self.leased.unwrap_or(case.leased);
            case.ahead = self.ahead.unwrap_or(case.ahead);
            case.overtake = self.overtake.unwrap_or(case.overtake);
            let faults = case.faults();
            if !faults.is_empty() {
                return Err(BadCase::Faults { case: case.name, faults });
            }
            let run = |&arm| Run { case: case.clone(), arm, params, record: self.record.clone() };
            runs.extend(self.arms.iter().map(run));
        }
        let one = runs.len() == 1 && runs[0].arm == ArmKind::Fletch;
        if self.record.is_some() && !one {
            return Err(BadCase::Record);
        }
        Ok(runs)
    }

    fn cases(&self) -> Result<Vec<Case>, BadCase> {
        Ok(match (&self.case, self.which) {
            (Some(path), _) => file::read(path)?,
            (None, Which::Rows) => cases::rows(self.units, self.size, self.seed),
            (None, Which::Extras) => cases::extras(),
            (None, Which::Grid) => cases::grid(self.seed),
            (None, Which::Scale) => vec![cases::scale(self.jobs, self.units, self.cache, self.seed)],
        })
    }
}

/// The policy's constants, by the names that `--set` knows.
fn named(k: &mut SweepParams) -> [(&'static str, &mut f64); 21] {
    [
        ("window", &mut k.window),
        ("window_units", &mut k.window_units),
        ("window_few", &mut k.window_few),
        ("window_least", &mut k.window_least),
        ("window_poor", &mut k.window_poor),
        ("window_of_cache", &mut k.window_of_cache),
        ("lead", &mut k.lead),
        ("spread", &mut k.spread),
        ("spread_slow", &mut k.spread_slow),
        ("young", &mut k.young),
        ("backlog", &mut k.backlog),
        ("early", &mut k.early),
        ("ahead", &mut k.ahead),
        ("jump", &mut k.jump),
        ("range", &mut k.range),
        ("wanted", &mut k.wanted),
        ("aside", &mut k.aside),
        ("stir", &mut k.stir),
        ("active", &mut k.active),
        ("rotate", &mut k.rotate),
        ("aside_backlog", &mut k.aside_backlog),
    ]
}

/// Reads `name=value` settings of the policy's constants.
///
/// # Errors
/// [`BadCase::Knob`].
pub fn params(set: &[String]) -> Result<SweepParams, BadCase> {
    let mut k = SweepParams::default();
    for s in set {
        let bad = |why: String| BadCase::Knob { set: s.clone(), why };
        let (name, value) = s.split_once('=').ok_or_else(|| bad("expected name=value".to_owned()))?;
        let value: f64 = value.parse().map_err(|_| bad("not a number".to_owned()))?;
        if !value.is_finite() || value < 0.0 {
            return Err(bad("a constant is finite and not below 0".to_owned()));
        }
        match named(&mut k).into_iter().find(|(n, _)| *n == name) {
            Some((_, field)) => *field = value,
            None => {
                let mut usual = SweepParams::default();
                let all: Vec<String> = named(&mut usual).iter().map(|(n, v)| format!("{n}={v}")).collect();
                return Err(bad(format!("no such constant; by default {}", all.join(" "))));
            }
        }
    }
    Ok(k)
}
