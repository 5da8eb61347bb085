//! Runs blocking reads, a bounded number at a time.
//!
//! A read that hangs, as on a network file system that has gone, makes way for others, but keeps its
//! thread. So the number of hanging reads is bounded as well.

use std::fmt::Display;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinError;

/// How many reads run at once.
const MOST: usize = 16;

/// How many more may hang.
const MAX_SLOW: usize = 64;

/// A read that takes longer hangs.
const SLOW: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Reads {
    running: Semaphore,
    slow: Semaphore,
}

impl Reads {
    pub(super) const fn new() -> Self {
        Self {
            running: Semaphore::const_new(MOST),
            slow: Semaphore::const_new(MAX_SLOW),
        }
    }

    /// Runs `read` on a thread once there is room.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        what: impl Display,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        // The semaphore is never closed.
        let mut running = self.running.acquire().await.ok();
        let mut reading = tokio::task::spawn_blocking(read);
        if let Ok(finished) = tokio::time::timeout(SLOW, &mut reading).await {
            return finished;
        }
        tracing::warn!(
            target: "cache",
            "{what} has not been read within {SLOW:?}; other files are, meanwhile"
        );
        let slow = self.slow.try_acquire();
        if slow.is_ok() {
            running = None;
        }
        let finished = reading.await;
        drop((running, slow));
        finished
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};

    use parking_lot::Mutex;
    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn reads_that_hang_make_room_for_others_up_to_a_bound() {
        let (reads, begun) = (Arc::new(Reads::new()), Arc::new(AtomicUsize::new(0)));
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let mut tasks = JoinSet::new();
        for number in 0..1000 {
            let (reads, begun, held) = (reads.clone(), begun.clone(), held.clone());
            tasks.spawn(async move {
                let read = move || {
                    begun.fetch_add(1, Ordering::Relaxed);
                    // It ends when the sender is dropped.
                    held.lock().recv().unwrap_err();
                };
                reads.run(number, read).await.unwrap();
            });
        }
        for round in 1..=8 {
            let expected = (round * MOST).min(MOST + MAX_SLOW);
            for _ in 0..20_000 {
                if begun.load(Ordering::Relaxed) >= expected {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
                tokio::task::yield_now().await;
            }
            // Others would begin now, if there were room.
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(begun.load(Ordering::Relaxed), expected);
            tokio::time::advance(SLOW).await;
        }
        drop(release);
        while let Some(read) = tasks.join_next().await {
            read.unwrap();
        }
        assert_eq!(begun.load(Ordering::Relaxed), 1000);
    }
}
