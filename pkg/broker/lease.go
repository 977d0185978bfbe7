// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

var leaseKind = coordinationv1.SchemeGroupVersion.WithKind("Lease")

// lease holds the Lease of this infra cluster in a tenant's cluster. The renewals show the tenant
// that the broker is alive, and their answers show the broker that the tenant is. If two infra
// clusters want the same tenant, the holder of the Lease serves it.
type lease struct {
	client   client.Client // not cached
	key      client.ObjectKey
	identity string
	duration time.Duration
	timeout  time.Duration

	lastSeen *coordinationv1.Lease // as last read or written; nil if unknown
	// unchangedSince is when another holder was last seen to renew. It is local time, because the
	// clocks of the two infra clusters may differ.
	unchangedSince time.Time
}

// leaseRenewals is how many renewal periods a Lease lasts.
const leaseRenewals = 4

func newLease(config *rest.Config, namespace string, o Options) (*lease, error) {
	scheme := runtime.NewScheme()
	if err := coordinationv1.AddToScheme(scheme); err != nil {
		return nil, err
	}

	mapper, err := restMapper(nil, nil)
	if err != nil {
		return nil, err
	}

	c, err := client.New(config, client.Options{Scheme: scheme, Mapper: mapper})
	return &lease{
		client: c, key: client.ObjectKey{Namespace: namespace, Name: v1alpha1.BrokerLease},
		identity: o.Identity,
		duration: leaseRenewals * o.RenewPeriod, timeout: o.RequestTimeout,
	}, err
}

// heldError is returned if another infra cluster holds the Lease.
type heldError struct{ holder, lease string }

func (e *heldError) Error() string {
	return fmt.Sprintf("the broker of another infra cluster, %s, has Lease %s; end that one, or "+
		"delete the XPUTenant in one of the two",
		e.holder, e.lease)
}

// leaseAttempts bounds the immediate retries after a write conflict, because an API server can
// answer Conflict forever.
const leaseAttempts = 3

// renew renews the Lease, or takes it if it is free or has expired.
func (l *lease) renew(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()

	for range leaseAttempts {
		if err = l.attempt(ctx); !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return err
		}
		l.lastSeen = nil
	}

	return err
}

func (l *lease) attempt(ctx context.Context) error {
	if l.lastSeen == nil {
		var got coordinationv1.Lease
		err := l.client.Get(ctx, l.key, &got)
		if apierrors.IsNotFound(err) {
			return l.create(ctx)
		}
		if err != nil {
			return fmt.Errorf("Lease %s: %w", l.key, err)
		}
		l.lastSeen = &got
	}

	next := l.lastSeen.DeepCopy()
	if holder := ptr.Deref(next.Spec.HolderIdentity, ""); holder != l.identity && holder != "" {
		if l.unchangedSince.IsZero() {
			l.unchangedSince = time.Now()
		}
		if time.Since(l.unchangedSince) < l.duration {
			return l.checkRenewed(ctx, holder)
		}
		next.Spec.LeaseTransitions = new(ptr.Deref(next.Spec.LeaseTransitions, 0) + 1)
		next.Spec.AcquireTime = now()
	}

	next.Spec.HolderIdentity, next.Spec.RenewTime = &l.identity, now()
	next.Spec.LeaseDurationSeconds = new(int32(max(l.duration, time.Second).Seconds()))
	if err := l.client.Update(ctx, next); err != nil {
		return fmt.Errorf("renew Lease %s: %w", l.key, err)
	}

	l.lastSeen, l.unchangedSince = next, time.Time{}
	return nil
}

// checkRenewed notes whether the other holder has renewed the Lease, and returns a heldError.
func (l *lease) checkRenewed(ctx context.Context, holder string) error {
	var got coordinationv1.Lease
	if err := l.client.Get(ctx, l.key, &got); err != nil {
		return fmt.Errorf("Lease %s: %w", l.key, err)
	}
	if got.ResourceVersion != l.lastSeen.ResourceVersion {
		l.lastSeen, l.unchangedSince = &got, time.Now()
	}
	return &heldError{holder: holder, lease: l.key.String()}
}

func (l *lease) create(ctx context.Context) error {
	made := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: l.key.Namespace, Name: l.key.Name},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &l.identity, AcquireTime: now(), RenewTime: now(),
			LeaseDurationSeconds: new(int32(max(l.duration, time.Second).Seconds())),
		},
	}

	if err := l.client.Create(ctx, made); err != nil {
		return fmt.Errorf("create Lease %s: %w", l.key, err)
	}

	l.lastSeen = made
	return nil
}
