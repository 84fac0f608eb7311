//! Attacks on a server: one thread attacks with a fifth of a core at most, a victim reads, and probes ask.
//!
//! An [`Attack`] takes small steps on sockets that never block. [`besiege`] takes the steps of all attacks in
//! turn, and reports what the victim and the probes noticed.

mod descriptors;
mod http;
mod kinds;
mod pace;
mod siege;

pub use descriptors::Descriptors;
pub use http::{Link, Reply, Stream};
pub use kinds::{
    Batches, EndlessBodies, Idle, InventedJobs, LongBodies, Repeated, SlowBodies, SlowHeads, SlowReaders,
};
pub use pace::Pace;
pub use siege::{Fortress, Report, besiege};

use std::{net::SocketAddr, path::PathBuf};

/// What an attack is aimed at, and what the attacker knows.
#[derive(Debug, Clone)]
pub struct Target {
    /// The TCP address of the server.
    pub addr: SocketAddr,
    /// The path of its unix socket.
    pub socket: PathBuf,
    /// The attacker's token, if it has one.
    pub token: Option<String>,
    /// The root of a version that the attacker's tenant may read, and the path of a large file in it.
    pub root: String,
    /// The path of a file of several MiB.
    pub large: String,
}

impl Target {
    /// Returns the head of a request, without the last empty line.
    #[must_use]
    pub fn head(&self, method: &str, path: &str) -> String {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.addr);
        if let Some(token) = &self.token {
            head += &format!("authorization: Bearer {token}\r\n");
        }
        head
    }
}

/// An attack, taken step by step.
pub trait Attack: Send {
    /// Returns the attack's name in reports.
    fn name(&self) -> &'static str;

    /// Returns how many connections it opened so far.
    fn opened(&self) -> u64;

    /// Takes the next step: a few system calls, none of which blocks.
    fn step(&mut self, target: &Target);
}
