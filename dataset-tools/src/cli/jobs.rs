//! The commands of `fletch jobs`.

use clap::{ArgGroup, Subcommand};
use fletch_settings::ByteSize;
use std::path::PathBuf;
use std::str::FromStr;

/// `fletch jobs`.
#[derive(Debug, Subcommand)]
pub enum JobsCommand {
    /// List the jobs.
    #[command(after_help = "Example:
  fletch jobs list --server http://127.0.0.1:7380

Prints name, dataset and root of each job. --json prints {jobs: [{id, name, dataset, root}]}.")]
    List,
    /// Show a job and the progress of its epochs.
    #[command(after_help = "Example:
  fletch jobs show train-7

Of each epoch prints number, state, acknowledged and planned samples, held samples, redelivered samples, and
the commits to which the job can roll back. --json prints the job as `GET /v1/jobs/{id}` returns it.")]
    Show {
        /// The job's name or id.
        job: String,
    },
    /// Change what a job gets of the disk: its weight, and its dataset's least share.
    #[command(after_help = "Examples:
  fletch jobs set train-7 --weight 2
  fletch jobs set train-7 --min-share 20GiB
  fletch jobs set train-7 --weight default --min-share default

The job's tenant has a weight, which its running jobs divide by their own. A job with twice the weight of
another counts as two. The least share is of the job's dataset, holds while it runs, and needs an admin.
Settings that are not named stay. --json prints {id, name, settings: {weight, min_share_bytes}}.")]
    #[command(group = ArgGroup::new("setting").required(true).multiple(true))]
    Set {
        /// The job's name or id.
        job: String,
        /// Its weight beside its tenant's other jobs, 0.001 to 1000, or `default` (1).
        #[arg(long, value_name = "N", group = "setting", allow_negative_numbers = true)]
        weight: Option<OrDefault<f64>>,
        /// The bytes of disk that its dataset gets at least, or `default` (none).
        #[arg(long, value_name = "SIZE", group = "setting")]
        min_share: Option<OrDefault<ByteSize>>,
    },
    /// Measure how fast a job is if it waits for no origin: for about 100 steps it gets cached samples only.
    #[command(after_help = "Example:
  fletch jobs probe train-7

For a job of which `fletch jobs show` says \"at most\": it waits so much that its acks give only a bound.
Needs a job that trains now under the order substitute, with a part of its dataset in the cache. Its epoch
reads as much from the origin as without a probe. Waits until the probe is over; Ctrl-C ends the waiting only.
--json prints {entries, of_entries, age_s, is_over, most_rate}; the rate is in samples a second.")]
    Probe {
        /// The job's name or id.
        job: String,
    },
    /// Continue a job from a saved state, also if its server is lost.
    #[command(after_help = "Example:
  fletch jobs restore train-7 --state epoch.state

FILE has the bytes of `state_dict()[\"state\"]` of the loader, or of `GET /v1/jobs/{id}/epochs/{n}/state`. If
the job's server is away, the state moves the job to another server of the cluster. Nothing that was
delivered after the state counts. --json prints {id, name, epoch, acked}.")]
    Restore {
        /// The job's name or id.
        job: String,
        /// The file with the state.
        #[arg(long, value_name = "FILE")]
        state: PathBuf,
        /// Also if a server serves the job. End its ranks first.
        #[arg(long)]
        replace: bool,
    },
    /// Move a job to another server of the cluster, while its ranks run.
    #[command(after_help = "Example:
  fletch jobs move train-7 --to cache-2

The job goes with its ledgers, and the jobs that share its sweep go with it. Ranks wait for a moment, and
nothing is delivered twice. `fletch cluster drain` moves all jobs of a server. --json prints
{id, name, to, jobs}.")]
    Move {
        /// The job's name or id.
        job: String,
        /// The id of the server, as in `fletch cluster status`.
        #[arg(long, value_name = "MEMBER")]
        to: String,
    },
    /// Give up the process of a rank, so that a job whose server is lost goes on without it.
    #[command(after_help = "Example:
  fletch jobs lost train-7 --rank 3

A job whose server is lost goes on when the processes of all its ranks have said what they consumed. `fletch
jobs list` names those that are missing. What only the lost process knew is delivered again. --json prints
{id, name, rank, waits_for}.")]
    Lost {
        /// The job's name or id.
        job: String,
        /// The rank whose process is gone.
        #[arg(long)]
        rank: u32,
    },
    /// Delete jobs with their ledgers. Their names become free, and their receipts are gone.
    #[command(after_help = "Example:
  fletch jobs delete train-7 train-8

A training process of a deleted job fails at its next request. --json prints {deleted: [{id, name}]}.")]
    Delete {
        /// The jobs' names or ids.
        #[arg(required = true, value_name = "JOB")]
        jobs: Vec<String>,
    },
}

/// A value, or `default`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrDefault<T>(pub Option<T>);

impl<T: FromStr> FromStr for OrDefault<T> {
    type Err = T::Err;

    fn from_str(s: &str) -> Result<Self, T::Err> {
        if s == "default" { Ok(OrDefault(None)) } else { s.parse().map(|value| OrDefault(Some(value))) }
    }
}
