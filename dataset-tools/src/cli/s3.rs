//! The commands of `fletch s3`.

use clap::Subcommand;
use fletch_settings::Span;

/// `fletch s3`.
#[derive(Debug, Subcommand)]
pub enum S3Command {
    /// Print credentials for the S3 door of the server, as variables for a shell.
    #[command(after_help = "Examples:
  eval \"$(fletch s3 credentials --server http://127.0.0.1:7380)\"
  fletch s3 credentials --ttl 7d --json

The credentials are derived from your token, read what it may read, and end with it. docs/howto/s3.md has
the clients. --json prints {access_key_id, secret_access_key, expires_ns, endpoint_url, bucket}.")]
    Credentials {
        /// How long they are valid, at most 90d [default: 12h].
        #[arg(long, value_name = "TIME")]
        ttl: Option<Span>,
    },
}
