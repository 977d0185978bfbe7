// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// receiveBuffer is the buffer of a subscription, in bytes. If messages are lost, everything is read
// again.
const receiveBuffer = 4 << 20

// retryPause is the pause after a failure.
const retryPause = 100 * time.Millisecond

// follow updates the tree when netdevs change, until ctx ends.
func (h *Host) follow(ctx context.Context) error {
	if h.pairs == nil {
		return nil
	}

	for ns, handle := range map[netns.NsHandle]func(netlink.LinkUpdate) error{
		h.pairs.hostNS: h.hostChanged, h.pairs.xpuNS: h.xpuChanged,
	} {
		updates, done, err := subscribe(ctx, ns)
		if err != nil {
			return fmt.Errorf("subscribe to links: %w", err)
		}

		h.workers.Go(func() {
			for {
				for update := range updates {
					if err := handle(update); err != nil {
						h.log.Error(err, "Tree may differ from the netdevs", "netdev",
							update.Attrs().Name)
						h.syncUntilSuccess(ctx)
					}
				}

				done()
				if updates, done = h.resubscribe(ctx, ns); updates == nil {
					return
				}
			}
		})
	}

	return nil
}

// subscribe returns a channel that is closed when ctx ends or messages are lost. done releases its
// resources.
func subscribe(
	ctx context.Context, ns netns.NsHandle,
) (_ <-chan netlink.LinkUpdate, done func(), err error) {
	ctx, done = context.WithCancel(ctx)
	updates := make(chan netlink.LinkUpdate)
	err = netlink.LinkSubscribeWithOptions(updates, ctx.Done(), netlink.LinkSubscribeOptions{
		Namespace: &ns, ReceiveBufferSize: receiveBuffer, ReceiveBufferForceSize: true,
	})
	if err != nil {
		done()
	}
	return updates, done, err
}

// resubscribe returns nil when ctx has ended.
func (h *Host) resubscribe(
	ctx context.Context, ns netns.NsHandle,
) (<-chan netlink.LinkUpdate, func()) {
	for ctx.Err() == nil {
		updates, done, err := subscribe(ctx, ns)
		if err == nil {
			h.syncUntilSuccess(ctx)
			return updates, done
		}
		h.log.Error(err, "Cannot subscribe to links, trying again")
		loop.Sleep(ctx, retryPause)
	}
	return nil, nil
}

// syncUntilSuccess calls syncAll until it succeeds or ctx ends, because no further message may come
// after a temporary failure.
func (h *Host) syncUntilSuccess(ctx context.Context) {
	for ctx.Err() == nil {
		err := h.syncAll()
		if err == nil {
			return
		}
		h.log.Error(err, "Tree may differ from the netdevs, looking again")
		loop.Sleep(ctx, retryPause)
	}
}

// hostChanged handles a message about a netdev on the host.
func (h *Host) hostChanged(update netlink.LinkUpdate) error {
	if update.Family == unix.AF_BRIDGE {
		return nil // about a bridge port, not about the netdev
	}

	h.mutex.Lock()
	defer h.mutex.Unlock()

	for _, f := range h.functions {
		switch update.Header.Type {
		case unix.RTM_NEWLINK:
			if f.pair.representor != 0 && h.pairs.representorOf(update.Link) == f.pair.representor {
				return h.showNetdev(f, update.Link)
			}
		case unix.RTM_DELLINK:
			if f.pair.netdev == int(update.Index) {
				return h.showNetdev(f, nil)
			}
		}
	}

	return nil
}

// xpuChanged handles a message about a representor.
func (h *Host) xpuChanged(update netlink.LinkUpdate) error {
	if update.Family == unix.AF_BRIDGE {
		return nil
	}

	h.mutex.Lock()
	defer h.mutex.Unlock()

	for _, f := range h.functions {
		if f.pair.representor == int(update.Index) {
			return h.syncRepresentor(f)
		}
	}

	return nil
}

// syncAll reads everything again, in case messages were missed.
func (h *Host) syncAll() error {
	h.mutex.Lock()
	defer h.mutex.Unlock()

	var errs []error
	for _, f := range h.functions {
		if f.pair.representor != 0 {
			errs = append(errs, h.syncRepresentor(f), h.syncNetdev(f))
		}
	}

	return errors.Join(errs...)
}

// syncRepresentor records the state of a representor, and creates the pair again if it is gone. It
// asks the kernel instead of trusting the message, because a netdev that is being destroyed first
// goes down and leaves its bridge.
func (h *Host) syncRepresentor(f *function) error {
	link, err := h.pairs.xpu.LinkByIndex(f.pair.representor)
	if err == nil {
		f.pair.up, f.pair.master = link.Attrs().RawFlags&unix.IFF_UP != 0, link.Attrs().MasterIndex
		return nil
	}
	if ignoreMissing(err) != nil {
		return fmt.Errorf("representor %s: %w", f.Representor, err)
	}

	h.log.Info("The netdev was destroyed with its network namespace, making it anew", "function",
		f.Address, "netdev", f.Netdev)
	if err := h.showNetdev(f, nil); err != nil {
		return err
	}

	err = h.makeNetdev(f, f.Netdev)
	if errors.Is(err, unix.EEXIST) {
		err = h.makeNetdev(f, "dev%d") // a temporary name, like the kernel's if the name is taken
	}

	return err
}

// syncNetdev updates the tree for a function's netdev.
func (h *Host) syncNetdev(f *function) error {
	link, err := h.pairs.netdev(f.pair)
	if err != nil {
		return fmt.Errorf("netdev of %s: %w", f.Address, err)
	}
	return h.showNetdev(f, link)
}

// showNetdev shows a function's netdev in the tree; nil means that it is not on the host.
func (h *Host) showNetdev(f *function, link netlink.Link) error {
	var now netdev
	f.pair.netdev = 0
	if link != nil {
		now, f.pair.netdev = netdevOf(f, link), link.Attrs().Index
	}
	if now == f.shown {
		return nil
	}
	if err := h.tree.show(f.device, f.shown, now); err != nil {
		return fmt.Errorf("netdev of %s: %w", f.Address, err)
	}

	f.shown = now
	for _, g := range []*function{h.functions[f.PF], f} {
		if g != nil && g.pair.netdev != 0 {
			return h.pairs.announce(g.pair.netdev)
		}
	}

	return nil
}

func netdevOf(f *function, link netlink.Link) netdev {
	a := link.Attrs()
	n := netdev{
		name: a.Name, index: a.Index, mtu: a.MTU, address: a.HardwareAddr.String(),
		state: a.OperState.String(),
		up:    a.RawFlags&unix.IFF_UP != 0, carrier: a.RawFlags&unix.IFF_LOWER_UP != 0,
	}

	if f.Index < 0 {
		n.portName, n.speed = "p"+strconv.Itoa(f.pf), f.card.LinkSpeed
	}
	return n
}

// watchNumVFs implements the sriov_numvfs files (Documentation/PCI/pci-iov-howto.rst): 0 removes
// all VFs, another number creates as many.
func (h *Host) watchNumVFs(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}

	pfs := map[string]*function{}
	for _, f := range h.functions {
		if f.Index < 0 {
			path := h.numVFs(f)
			pfs[path] = f
			if err := watcher.Add(path); err != nil {
				return errors.Join(fmt.Errorf("%s: %w", path, err), watcher.Close())
			}
		}
	}

	h.workers.Go(func() {
		defer watcher.Close()
		for {
			select {
			case <-ctx.Done():
				return
			case event := <-watcher.Events:
				if f := pfs[event.Name]; f != nil && event.Has(fsnotify.Write) {
					h.numVFsWritten(f)
				}
			case err := <-watcher.Errors:
				h.log.Error(err, "A write to sriov_numvfs may have been missed")
			}
		}
	})

	return nil
}

func (h *Host) numVFs(pf *function) string {
	return filepath.Join(h.tree.dir(pf.device), "sriov_numvfs")
}

func (h *Host) numVFsWritten(pf *function) {
	h.mutex.Lock()
	defer h.mutex.Unlock()

	text, err := os.ReadFile(h.numVFs(pf))
	if err == nil && len(text) == 0 || errors.Is(err, fs.ErrNotExist) {
		return // the write or Close is not finished
	}

	var n int
	if err == nil {
		n, err = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	if err == nil && n == len(pf.vfs) {
		return
	}

	switch {
	case err != nil:
	case n == 0:
		err = h.removeVFs(pf)
	default:
		err = h.addVFs(pf, n)
	}

	if err == nil {
		return // the file has this value already, and may have the next one soon
	}
	if err := errors.Join(err, h.showNumVFs(pf)); err != nil {
		h.log.Error(err, "Write to sriov_numvfs refused", "pf", pf.Address)
	}
}

// showNumVFs overwrites the watched file instead of replacing it.
func (h *Host) showNumVFs(pf *function) error {
	return os.WriteFile(h.numVFs(pf), []byte(strconv.Itoa(len(pf.vfs))+"\n"), 0o644)
}
