//! The command line of `fletch simulate` and `fletch-simulate`.

use crate::{
    ArmKind, BadCase, Case, Origin, Outcome, cases,
    cluster::{
        self, Arm,
        mixes::{MIXES, Mix},
        table::Row,
    },
    engine, file, table, traces,
};
use clap::{Args, Parser, ValueEnum};
use fletch_core::{
    capacity::ProblemError,
    order::sweep::{PARAM_MAX, SweepParams},
};
use std::{io::Write, path::PathBuf};

/// Simulates jobs that share a dataset through a cache, in virtual time.
#[derive(Debug, Parser)]
#[command(name = "fletch-simulate", version)]
pub struct Cli {
    /// The cases and settings.
    #[command(flatten)]
    pub args: SimulateArgs,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    pub json: bool,
}

/// A named set of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// The thirteen main rows
    Rows,
    /// Pauses, joins, leaves, subsets, sizes, strict readers
    Extras,
    /// Cache × jobs × arrangement × speeds: 320 cases
    Grid,
    /// Many jobs over many single-sample units, two epochs each
    Scale,
    /// Jobs that come and go on one cache, under five ways to divide it
    Cluster,
}

/// The arguments of a simulation.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Named set of cases: rows, extras, grid, scale or cluster
    #[arg(value_enum, default_value = "rows", conflicts_with = "case", hide_possible_values = true)]
    pub which: Which,
    /// Simulate the case, or cases, of a TOML (.toml) or JSON file
    #[arg(long, value_name = "FILE")]
    pub case: Option<PathBuf>,
    /// Policy: direct, lru, pin or fletch; or several
    #[arg(long = "arm", value_name = "ARM", value_enum, default_values = ["fletch"])]
    #[arg(hide_possible_values = true)]
    pub arms: Vec<ArmKind>,
    /// Set a constant of the sweep policy (an unknown name lists all)
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Seed of rows, grid and scale; the first seed of cluster
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Units of the dataset, for rows and scale
    #[arg(long, value_name = "N", default_value_t = 800)]
    pub units: usize,
    /// Samples in a unit, for rows
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub size: u32,
    /// Number of jobs, for scale
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub jobs: usize,
    /// Cache size as a part of the dataset, for scale
    #[arg(long, value_name = "PART", default_value_t = 0.1)]
    pub cache: f64,
    /// Number of seeds, for cluster
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    pub seeds: u64,
    /// Record the trace of the sweep, of one case and the arm fletch
    #[arg(long, value_name = "FILE", conflicts_with = "play")]
    pub record: Option<PathBuf>,
    /// Play a recorded trace again, and compare every result
    #[arg(long, value_name = "FILE", conflicts_with = "case")]
    pub play: Option<PathBuf>,
    /// Run only the cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Bandwidth of the origin in samples a second [default: as the case]
    #[arg(long, value_name = "RATE")]
    pub bandwidth: Option<f64>,
    /// Latency of the origin in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, requires = "bandwidth")]
    pub latency: f64,
    /// Most samples that each job has been granted and has not consumed
    #[arg(long, value_name = "N")]
    pub leased: Option<usize>,
    /// Samples decided before their grant
    #[arg(long, value_name = "N")]
    pub ahead: Option<usize>,
    /// Most older picks that one whose bytes are cached may overtake
    #[arg(long, value_name = "N")]
    pub overtake: Option<usize>,
}

/// A case to be simulated against an arm.
#[derive(Debug, Clone)]
pub struct Run {
    /// The case.
    pub case: Case,
    /// The policy between its jobs and its origin.
    pub arm: ArmKind,
    /// The constants of the sweep policy.
    pub params: SweepParams,
    /// File for the trace, if it is recorded.
    pub record: Option<PathBuf>,
}

impl Run {
    /// Simulates without recording. Calls `watch` with the part that is done.
    #[must_use]
    pub fn simulate(&self, watch: &mut dyn FnMut(f64)) -> Outcome {
        engine::simulate_with(&self.case, self.arm, self.params, watch)
    }

    /// Simulates, and records the trace if `record` is set.
    ///
    /// # Errors
    /// [`BadCase::Write`] when the trace cannot be written.
    pub fn play(&self, watch: &mut dyn FnMut(f64)) -> Result<Outcome, BadCase> {
        match &self.record {
            Some(path) => traces::record(&self.case, self.params, path),
            None => Ok(self.simulate(watch)),
        }
    }
}

impl Cli {
    /// Runs the program.
    ///
    /// # Errors
    /// Unknown constants, unreadable or faulty cases, errors of the writer.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        if let Some(path) = &self.args.play {
            let played = traces::play(path)?;
            writeln!(out, "{played}")?;
            return Ok(());
        }
        if self.args.is_clusters() {
            return self.clusters(out);
        }
        if !self.json {
            writeln!(out, "{}", table::HEADING)?;
        }
        for run in self.args.runs()? {
            table::write(out, &run.play(&mut |_| {})?, self.json)?;
        }
        Ok(())
    }

    fn clusters(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        if !self.json {
            writeln!(out, "{}", cluster::table::HEADING)?;
        }
        for row in self.args.cluster_rows() {
            let row = self.args.play_row(&row)?;
            let line = if self.json { serde_json::to_string(&row)? } else { row.line() };
            writeln!(out, "{line}")?;
        }
        Ok(())
    }
}

impl SimulateArgs {
    /// Returns the runs, in order. All their cases have been checked.
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

    /// Whether the clusters are asked for, which are no cases.
    #[must_use]
    pub fn is_clusters(&self) -> bool {
        self.case.is_none() && self.which == Which::Cluster
    }

    /// Returns the rows of the table of clusters, in order. Each is played with [`SimulateArgs::play_row`].
    #[must_use]
    pub fn cluster_rows(&self) -> Vec<(Mix, Arm)> {
        let is_wanted = |mix: &&Mix| self.only.as_ref().is_none_or(|o| mix.name.contains(o.as_str()));
        let arms = |mix: &Mix| Arm::ALL.map(|arm| (*mix, arm));
        MIXES.iter().filter(is_wanted).flat_map(arms).collect()
    }

    /// Plays one row of the table of clusters, over the seeds.
    ///
    /// # Errors
    /// A cluster whose numbers cannot be used.
    pub fn play_row(&self, (mix, arm): &(Mix, Arm)) -> Result<Row, ProblemError> {
        Row::play(mix, *arm, self.seed, self.seeds)
    }

    fn cases(&self) -> Result<Vec<Case>, BadCase> {
        Ok(match (&self.case, self.which) {
            (Some(path), _) => file::read(path)?,
            (None, Which::Rows) => cases::rows(self.units, self.size, self.seed),
            (None, Which::Extras) => cases::extras(),
            (None, Which::Grid) => cases::grid(self.seed),
            (None, Which::Scale) => vec![cases::scale(self.jobs, self.units, self.cache, self.seed)],
            // Clusters are not cases: see `cluster_rows`.
            (None, Which::Cluster) => Vec::new(),
        })
    }
}

/// Returns the constants of the sweep policy by the names of `--set`.
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

/// Parses `name=value` settings of the sweep policy's constants.
///
/// # Errors
/// [`BadCase::Param`].
pub fn params(set: &[String]) -> Result<SweepParams, BadCase> {
    let mut k = SweepParams::default();
    for s in set {
        let bad = |why: String| BadCase::Param { set: s.clone(), why };
        let (name, value) = s.split_once('=').ok_or_else(|| bad("give NAME=VALUE".to_owned()))?;
        let value: f64 = value.parse().map_err(|_| bad("the value is not a number".to_owned()))?;
        if !(0.0..=PARAM_MAX).contains(&value) {
            return Err(bad(format!("the value must be between 0 and {PARAM_MAX}")));
        }
        match named(&mut k).into_iter().find(|(n, _)| *n == name) {
            Some((_, field)) => *field = value,
            None => {
                let mut usual = SweepParams::default();
                let all: Vec<String> = named(&mut usual).iter().map(|(n, v)| format!("{n}={v}")).collect();
                return Err(bad(format!(
                    "no such constant; the constants and their defaults are {}",
                    all.join(" ")
                )));
            }
        }
    }
    Ok(k)
}
