//! The commands of `fletch cluster`.

use clap::Subcommand;

/// `fletch cluster`.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Show the servers of the cluster: state, part of the chunks, URL.
    #[command(after_help = "Example:
  fletch cluster status --server http://cache-1.example:7380,http://cache-2.example:7380

States: up, drained, restarting, down. docs/CLUSTER.md explains them.
--json prints {view, members: [{id, url, weight, zone, up, state}]}.")]
    Status,
    /// Ask every server what it says of itself, and compare the answers.
    #[command(after_help = "Example:
  fletch cluster check --server http://cache-1.example:7380

A row a server: build, view, revision, etcd, disk, clock, peers that answer it. Then a line a
finding: a silent server, a refused token, settings that differ (by hash). It needs an admin.
Exit code 0: healthy. 3: warnings only. 1: an error. --json prints {servers: [...], checks, findings}.")]
    Check,
    /// Write the keys of the cluster back to an etcd that lost them, from what the servers hold.
    #[command(after_help = "Examples:
  fletch cluster recover --dry-run
  fletch cluster recover --without-silent

Each server writes its jobs, one writes the datasets, and then all join again. It needs an admin.
It refuses while etcd has a cluster of this name. Start all servers first: what only one of them
knows is written back only if it answers. Exit code 3: servers were left out.
--json prints {uid, is_done, datasets_from, datasets, jobs, members, silent}.")]
    Recover {
        /// Print what would be written, and write nothing.
        #[arg(long)]
        dry_run: bool,
        /// Go on without servers that do not answer.
        #[arg(long)]
        without_silent: bool,
        /// The server whose datasets count, if the servers remember different ones.
        #[arg(long, value_name = "ID")]
        datasets_from: Option<String>,
    },
    /// Take a server out of the ring: it stays up and owns no chunks until it restarts.
    #[command(after_help = "Example:
  fletch cluster drain srv-2

Do it before a server goes for good. The command needs an admin, and any server of the cluster can do it.
--json prints what `fletch cluster status --json` prints.")]
    Drain {
        /// The server's id.
        id: String,
    },
}
