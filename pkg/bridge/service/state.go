// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
)

// openState opens the state file, which keeps what clients asked for, and loads it. Each write is
// on the disk before it returns. The values are messages of the API. Only the spec of a message
// counts, and a status that is TO_BE_DELETED. isNew says that no agent has used the file before.
func (a *Agent) openState() (isNew bool, err error) {
	a.state, err = boltfile.Open(a.cfg.State, func(tx *boltfile.Tx) error {
		networks, ports := tx.Has(networkNames.bucket), tx.Has(portNames.bucket)
		switch {
		case !networks && !ports:
			isNew = true
			return nil
		case !networks || !ports:
			return fmt.Errorf("%w (a bucket is missing)", boltfile.ErrCorrupt)
		}

		return errors.Join(a.networks.load(tx), a.ports.load(tx), a.vrfs.load(tx),
			a.svis.load(tx), a.networkOptions.load(tx), a.portOptions.load(tx),
			a.sentRemotes.load(tx))
	})

	if errors.Is(err, boltfile.ErrCorrupt) {
		return false, fmt.Errorf("state %s: %w; put a backup in its place, or move it away and "+
			"start once with --new-state: all ports are then "+
			"out of service until clients ask for them again", a.cfg.State, err)
	}

	if err != nil {
		return false, fmt.Errorf("state %s: %w", a.cfg.State, err)
	}

	return isNew, nil
}

// initState prepares a new state file. It refuses if an agent with another state file has made
// networks and ports, because removing them would end the traffic of every pod.
func (a *Agent) initState() error {
	netdevs, err := a.plane.Netdevs()
	if err != nil {
		return err
	}

	if len(netdevs) > 0 && !a.cfg.NewState {
		const shown = 5
		text := strings.Join(netdevs[:min(shown, len(netdevs))], ", ")
		if len(netdevs) > shown {
			text += fmt.Sprintf(" and %d more", len(netdevs)-shown)
		}
		return fmt.Errorf("state %s: is new, but %s are in use by what an agent has made before: "+
			"start with the --state of that agent, or once with "+
			"--new-state, which takes them out of service until clients ask for them again",
			a.cfg.State, text)
	}

	err = a.state.Update(func(tx *boltfile.Tx) error {
		for _, n := range []names{networkNames, portNames} {
			if err := tx.CreateBucket(n.bucket); err != nil {
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
