//! The commands of `fletch receipt`.

use crate::target::Target;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `fletch receipt`.
#[derive(Debug, Subcommand)]
pub enum ReceiptCommand {
    /// Show the receipt of a finished epoch.
    #[command(after_help = "Example:
  fletch receipt show train-7 3 --server http://127.0.0.1:7380 --json > epoch-3.receipt

--json prints the server's answer, {receipt, certificate}. `verify --receipt` reads it.")]
    Show {
        /// The job's name or id.
        job: String,
        /// The number of the epoch.
        epoch: u64,
    },
    /// Check that the consumption logs of all ranks are exactly the plan of the epoch.
    #[command(after_help = "Examples:
  fletch receipt verify rank-0.notes rank-1.notes --job train-7 --epoch 3 --server http://127.0.0.1:7380
  fletch receipt verify rank-*.notes --receipt epoch-3.receipt
  fletch receipt verify rank-*.notes --receipt epoch-3.receipt --ledger epoch-3.ledger --dataset /data/set@v3

Give the consumption logs of all ranks; docs/FORMATS-epochs.md has their format. Exit code 0: the logs agree
with the receipt. 1: they differ. Each missing, doubled or altered sample is named if the ledger and the
version are known; with --job the server gives both.
--json prints {agrees, root, epoch, deliveries, left_out, receipt: {delivered, redelivered, dropped, padded},
differs: [{what: doubled|altered|unknown|missing|count|value|receipt, path, ordinal, why}], more}.")]
    Verify {
        /// The consumption logs.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// The receipt to compare with.
        #[command(flatten)]
        proof: Proof,
    },
}

/// The receipt that consumption logs are compared with.
#[derive(Debug, Args)]
pub struct Proof {
    /// The job's name or id. The server gives receipt, ledger and version.
    #[arg(long, requires = "epoch")]
    pub job: Option<String>,
    /// The number of the job's epoch.
    #[arg(long, requires = "job")]
    pub epoch: Option<u64>,
    /// A saved receipt, instead of --job and --epoch.
    #[arg(long, value_name = "FILE", conflicts_with = "job")]
    pub receipt: Option<PathBuf>,
    /// The saved ledger of the epoch. Samples that it does not show as acknowledged do not count.
    #[arg(long, value_name = "FILE", requires = "receipt")]
    pub ledger: Option<PathBuf>,
    /// The version of the epoch, NAME|URI[@TAG|@ROOT], to name samples by their paths.
    #[arg(long, value_name = "DATASET", requires = "receipt")]
    pub dataset: Option<Target>,
}
