//! `fletch up`: starts the user's own server again, and gives it the credentials of this terminal.
//!
//! Mounts that wait for the server go on then. A mount runs this command by itself when its server is gone.

use super::Context;
use super::prepare::give_credentials;
use crate::failure::{Exit, Failure};
use crate::own_server::{OwnPaths, start};
use fletch_client::{Client, ClientConfig, Endpoint};
use serde::Serialize;
use std::path::PathBuf;

#[derive(Serialize)]
struct Up {
    /// Whether this command started it.
    started: bool,
    socket: PathBuf,
    log: PathBuf,
    /// The datasets that it knows.
    datasets: usize,
}

pub fn run(ctx: &Context) -> Result<Exit, Failure> {
    let own = OwnPaths::of_process()?;
    let started = ctx.rt.block_on(start::ensure(&own))?;
    let client = Client::new(ClientConfig::new(Endpoint::Unix(own.socket.clone()), "cli"))?;
    let datasets = ctx.rt.block_on(client.datasets())?;
    let mut exit = Exit::Ok;
    for dataset in &datasets {
        let uris = [ctx.registered_uri(&dataset.uri)?, ctx.registered_uri(&dataset.tables)?];
        // One expired login is no reason to leave the other datasets without theirs.
        if let Err(e) = give_credentials(ctx, &client, &[&uris[0], &uris[1]]) {
            ctx.out.warn(format_args!("{} cannot be read until this is mended: {e}", dataset.name));
            exit = Exit::Partial;
        }
    }
    let up = Up { started, log: own.server_log(), socket: own.socket, datasets: datasets.len() };
    ctx.out.result(&up, |w| {
        let how = if up.started { "started your server" } else { "your server runs already" };
        writeln!(w, "{how}, with the credentials of this terminal; its log is {}", up.log.display())
    })?;
    Ok(exit)
}
