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
