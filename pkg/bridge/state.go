// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
)

// openState opens the file that keeps what clients asked for, and loads it. Each write is on the
// disk before it returns. The values are messages of the API, of which only the spec counts, and a
// status that is TO_BE_DELETED. fresh says that no agent has used the file before.
func (a *Agent) openState() (fresh bool, err error) {
	a.state, err = boltfile.Open(a.cfg.State, func(tx *boltfile.Tx) error {
		networks, ports := tx.Has(networkKind.bucket), tx.Has(portKind.bucket)
		switch {
		case !networks && !ports:
			fresh = true
			return nil
		case !networks || !ports:
			return fmt.Errorf("%w (a bucket is missing)", boltfile.ErrCorrupt)
		}

		return errors.Join(a.networks.load(tx), a.ports.load(tx), a.networkOptions.load(tx),
			a.portOptions.load(tx))
	})

	if errors.Is(err, boltfile.ErrCorrupt) {
		return false, fmt.Errorf("state %s: %w; put a backup in its place, or move it away and "+
			"start once with --new-state: all ports are then "+
			"out of service until clients ask for them again", a.cfg.State, err)
	}

	if err != nil {
		return false, fmt.Errorf("state %s: %w", a.cfg.State, err)
	}

	return fresh, nil
}

// beginState makes a fresh file one that is in use, unless there is what an agent with another file
// has made: to go on would end the traffic of every pod.
func (a *Agent) beginState() error {
	made, err := a.plane.made()
	if err != nil {
		return err
	}

	if len(made) > 0 && !a.cfg.NewState {
		const some = 5
		names := strings.Join(made[:min(some, len(made))], ", ")
		if len(made) > some {
			names += fmt.Sprintf(" and %d more", len(made)-some)
		}
		return fmt.Errorf("state %s: is new, but %s are in use by what an agent has made before: "+
			"start with the --state of that agent, or once with "+
			"--new-state, which takes them out of service until clients ask for them again",
			a.cfg.State, names)
	}

	err = a.state.Update(func(tx *boltfile.Tx) error {
		for _, kind := range []kind{networkKind, portKind} {
			if err := tx.CreateBucket(kind.bucket); err != nil {
				return err
			}
		}
		return nil
	})

	if err != nil {
		return fmt.Errorf("state %s: %w", a.cfg.State, err)
	}

	return nil
}
