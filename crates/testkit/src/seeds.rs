//! Seeds of randomised tests: new at each run, printed with a failure, repeatable.

use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

/// The seed of this test: `FLETCH_TEST_SEED`, or a new one. It is printed, and the test runner
/// shows what a failed test printed.
///
/// # Panics
/// When `FLETCH_TEST_SEED` is no number.
#[must_use]
pub fn seed() -> u64 {
    let seed = match std::env::var("FLETCH_TEST_SEED") {
        Ok(text) => text.trim().parse().expect("FLETCH_TEST_SEED is a number below 2^64"),
        Err(_) => rand::random(),
    };
    println!("to repeat: FLETCH_TEST_SEED={seed}");
    seed
}

/// A generator that gives the same numbers for the same seed on every machine.
#[must_use]
pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// A standard normal number, from two uniform ones (Box and Muller, 1958).
pub(crate) fn normal(rng: &mut ChaCha8Rng) -> f64 {
    use rand::Rng as _;
    let (u, v): (f64, f64) = (rng.random_range(f64::MIN_POSITIVE..1.0), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}
